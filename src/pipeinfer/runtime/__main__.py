"""`python -m pipeinfer.runtime STAGE ...`: see entry.py.

An engine's libraries are loaded from the first moment on, beside the modules that all stages have.
"""

import sys

from pipeinfer.runtime.torch_libraries import preload_torch

libraries = preload_torch() if "engine" in sys.argv[1:2] else None

from pipeinfer.runtime.entry import main  # noqa: E402

try:
    code = main()
finally:
    if libraries is not None:
        libraries.join()
sys.exit(code)
