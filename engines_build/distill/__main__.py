"""Run ``engines_build.distill``."""

import sys

from engines_build.distill.command import main

if __name__ == "__main__":
    sys.exit(main())
