"""Arms the injector in every process of a run whose test asks for it: Python imports this file at its start, where the
test put its folder on PYTHONPATH. Without the variable, nothing happens."""

import os
import sys
import traceback

if "MEGATUNE_TEST_FAULTS" in os.environ:
    try:
        import fault_injector

        fault_injector.install_from_environment()
    except BaseException:  # Python would go on without it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(fault_injector.BROKEN if "fault_injector" in globals() else 88)
