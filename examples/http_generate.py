"""Stream a text over plain HTTP, with nothing but the standard library."""

import argparse
import json
import urllib.request

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://localhost:8000")
parser.add_argument("--prompt", default="One, two, three, one, two, three, one,")
options = parser.parse_args()

body = {
    "text_input": options.prompt,
    "max_tokens": 48,
    "stream": True,
    "return_perf_metrics": True,  # how speculation did, with the last event
}
url = f"{options.url}/v2/models/ensemble/generate_stream"
event = {}
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as lines:
    for line in lines:  # of server-sent events
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            print(event["text_output"], end="", flush=True)

accepted, proposed = event["total_accepted_draft_tokens"], event["total_draft_tokens"]
print(f"\n{accepted} of {proposed} proposed tokens were accepted")
