"""``python -m engines_build.distill``: see ``engines_build.distill.make_head``."""

from __future__ import annotations

from engines_build.distill.make_head import main

if __name__ == "__main__":
    main()
