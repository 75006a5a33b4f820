"""The models in recipes/models/, under a module name that is the same if the project is installed from a wheel.

A configuration may refer to a function in such a file, and every rank imports it by that name.
"""

from superpod.common import package_files

__path__ = [str(package_files.included_folder("recipes") / "models")]
