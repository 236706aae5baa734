"""An engine process that loads for ever, in native code that holds the interpreter's lock."""

import ctypes

if __name__ == "__main__":
    print("hangs", flush=True)
    ctypes.PyDLL(None).sleep(3600)
