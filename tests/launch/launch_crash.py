"""A module whose import crashes in native code."""

import faulthandler

faulthandler._sigsegv()
