"""An HTTP service in OpenAI's manner over the gRPC interface of the Triton models."""
