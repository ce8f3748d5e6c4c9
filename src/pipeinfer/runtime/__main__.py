"""`python -m pipeinfer.runtime STAGE ...`: see entry.py.

An engine's libraries are loaded from the first moment on, beside the modules that all stages have.
"""

import importlib
import sys

if sys.argv[1:2] == ["engine"]:
    importlib.import_module("pipeinfer.engine.preload").begin_early()

from pipeinfer.runtime.entry import main

sys.exit(main())
