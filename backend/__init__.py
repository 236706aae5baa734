"""The serving core: wire, requests, loop, engines and the Triton adapter."""
