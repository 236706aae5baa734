"""The policy's arithmetic: plain loops over arrays, compiled by numba (``compiling``).

Only functions of scalars and arrays live here. The modules of ``policy`` call the ``entry`` points.
"""
