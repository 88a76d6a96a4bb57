"""Whether a package is installed. A folder of tests that has its name is not it, as `find_spec` may think."""

from importlib.metadata import PackageNotFoundError, version


def installed(name):
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
