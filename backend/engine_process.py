"""``python -m backend.engine_process --config FILE --socket PATH``: the engine process
(``backend.ipc.process``). Processes that a hosted engine spawns import this module again, as
``__mp_main__``: it imports nothing before it runs.
"""

import sys

if __name__ == "__main__":
    from backend.ipc.process import main

    sys.exit(main())
