"""`strata` with a pool that refuses its second write of a RESTORE while a file of a given name exists, once.

Usage: broken_engine.py FILE ARGUMENT... where the arguments are those of strata.
"""

import itertools
import os
import sys

import kvcache
import strata


def main(marker: str, *arguments: str) -> int:
    write, calls = kvcache.PoolWindow.write, itertools.count(1)

    def refuse(self, part, offset, data):
        if os.path.exists(marker) and next(calls) == 2:
            os.unlink(marker)
            raise RuntimeError("the pool is broken")
        write(self, part, offset, data)

    kvcache.PoolWindow.write = refuse
    return strata.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
