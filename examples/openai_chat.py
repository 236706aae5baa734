"""Stream a chat through the OpenAI front end: pip install openai."""

import argparse

import openai

defaults = argparse.ArgumentDefaultsHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=defaults)
parser.add_argument("--url", default="http://localhost:9000/v1", help="base_url, with /v1")
parser.add_argument("--prompt", default="Write a short poem about the sea.")
parser.add_argument("--key", default="any", help="the server's OPENAI_API_KEY, if it has one")
options = parser.parse_args()

client = openai.OpenAI(base_url=options.url, api_key=options.key)
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": options.prompt}],
    max_completion_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        used = chunk.usage
        print(f"\n{model}: {used.prompt_tokens} tokens read, {used.completion_tokens} written")
