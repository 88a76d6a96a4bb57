"""Whether a package is installed; a folder of tests with its name, which `find_spec` finds, does not count."""

from importlib.metadata import PackageNotFoundError, version


def installed(name):
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
