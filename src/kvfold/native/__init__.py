"""Kernels in C for what torch has no operation for, each beside the torch code it stands in for.

A kernel is compiled when it is first wanted, with the machine's own C compiler, and kept in
kvfold's folder. Where there is no compiler, or `KVFOLD_NATIVE=0` is set, torch does the work.
"""
