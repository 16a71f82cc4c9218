"""A target whose import starts a thread, so that it must not be forked."""

import threading
import time

from launch_targets import finish, run_on  # noqa: F401

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("noise of an import")
