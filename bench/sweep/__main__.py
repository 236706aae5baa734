"""Run ``bench.sweep.run``."""

from bench.sweep.run import main

if __name__ == "__main__":
    main()
