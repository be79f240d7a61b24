"""Every error that FlatCake raises at a caller.

Each derives from `FlatCakeError` and from the built-in that it resembles, and its text says what was
given, what was expected, and what to change.  A storage fault is never one of these: it is a miss or a
refusal, a value with a reason.
"""


class FlatCakeError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(FlatCakeError, ValueError):
    """A setting is unknown, out of range, or at odds with another."""


class AddressError(FlatCakeError, ValueError):
    """A field of a global virtual address is out of range."""


class ShapeError(FlatCakeError, ValueError):
    """A tensor or table differs in shape, dtype, stride or device from its description."""


class PageTableError(FlatCakeError, ValueError):
    """A page table is too short, out of range, or names a page twice."""


class PlanError(FlatCakeError, ValueError):
    """Ranges cannot be turned into reads under the given limits."""


class CapacityError(FlatCakeError, OSError):
    """There is no room: on a medium, on the disk, or in the index."""


class OwnershipError(FlatCakeError, OSError):
    """The directory belongs to another process, or may not be written."""


class FormatError(FlatCakeError, ValueError):
    """A file in the directory was written by another format or geometry."""


class ClosedError(FlatCakeError, RuntimeError):
    """The store, lease or handle was closed before this call."""


class DeviceError(FlatCakeError, RuntimeError):
    """A device or an optional package that was asked for is not there."""
