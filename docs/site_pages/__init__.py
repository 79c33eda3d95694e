"""Pages of the documentation that come from the code.

`scripts/pages` writes those that are kept in the repository, and what is in deploy/share: man pages
and completion scripts. A test checks that they are current.
The pages of `dcpctl` and of the Python API are made while the site is built (docs/conf.py).
"""
