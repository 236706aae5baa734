"""Stream a text over gRPC with NVIDIA's client: pip install "tritonclient[grpc]"."""

import argparse
import queue

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput


def tensor(name, kind, value):
    """Return an input of one value; a text is of the kind BYTES."""
    made = InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(np.array([[value]]))
    return made


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="localhost:8001")
parser.add_argument("--prompt", default="One, two, three, one, two, three, one,")
options = parser.parse_args()

inputs = [
    tensor("text_input", "BYTES", options.prompt.encode()),
    tensor("max_tokens", "INT32", np.int32(48)),
    tensor("stream", "BOOL", True),
    tensor("return_perf_metrics", "BOOL", True),  # how speculation did, with the last reply
]
replies = queue.Queue()
with InferenceServerClient(options.url) as client:
    client.start_stream(lambda result, error: replies.put((result, error)))
    client.async_stream_infer("ensemble", inputs)
    while True:
        result, error = replies.get()
        if error:
            raise SystemExit(f"error: {error}")
        print(result.as_numpy("text_output").item().decode(), end="", flush=True)
        if result.as_numpy("finish_reason") is not None:
            break
if (drafts := result.as_numpy("draft_names")) is None:
    raise SystemExit("\nnothing was proposed")
print()
columns = result.as_numpy("draft_tokens"), result.as_numpy("accepted_draft_tokens")
for name, proposed, accepted in zip(drafts.flat, *(c.flat for c in columns), strict=True):
    print(f"{name.decode()}: {accepted} of {proposed} proposed tokens were accepted")
