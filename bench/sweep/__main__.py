"""Run ``bench.sweep.run``."""

import sys

from bench.sweep.run import main

if __name__ == "__main__":
    sys.exit(main())
