"""A replica among others: the worker that NVIDIA Dynamo sends requests to."""
