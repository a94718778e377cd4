"""Runs programs one after another in this process, whose frameworks are loaded once.

Called with a folder and the names of its programs, without any package on the path. What a program writes goes to files
next to it; a file ``NAME.done`` says that it came to its end.
"""

import faulthandler
import gc
import os
import runpy
import sys
import traceback


def main(folder: str, seconds: str, names: "list[str]") -> None:
    """Run the programs of a folder."""
    for name in names:
        path = os.path.join(folder, name)
        out, err = (open(f"{path}.{end}", "w", encoding="utf-8") for end in ("out", "err"))
        with out, err:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            faulthandler.enable(err)
            faulthandler.dump_traceback_later(float(seconds), exit=True, file=err)
            try:
                runpy.run_path(path, run_name="__main__")
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
        gc.collect()
        open(f"{path}.done", "w").close()


if __name__ == "__main__":
    # The modules next to this file are not for the programs.
    sys.path.pop(0)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)
