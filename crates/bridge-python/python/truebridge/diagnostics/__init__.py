"""What this package can do here, what it costs, and what it does: ``doctor``, ``bench``, ``trace`` and ``debug``."""
