"""Which files one request passes: `python -m tests.walks`."""
