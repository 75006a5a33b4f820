"""The models of recipes/models/, under a name that stays the same where the project is installed from a wheel.

A configuration may name a function of such a file, and every rank imports it by that name.
"""

from superpod.common import package_files

__path__ = [str(package_files.included("recipes") / "models")]
