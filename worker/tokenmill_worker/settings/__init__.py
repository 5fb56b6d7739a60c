"""Reads every setting of a worker once and reports all problems together.

Belongs here: the fields, their flags and help, the sources and their order. A value that is not a
setting, and everything that uses a setting, belongs elsewhere.
"""

from tokenmill_worker.settings.fields import ENGINE_FIELDS, PREFIX, Settings
from tokenmill_worker.settings.loading import child_environment, load_settings

__all__ = ["ENGINE_FIELDS", "PREFIX", "Settings", "child_environment", "load_settings"]
