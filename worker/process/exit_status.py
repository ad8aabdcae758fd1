"""What the worker process ends with. A supervisor restarts it, unless it is `CONFIG` or
the exit was asked for."""

from protocol.errors import EXIT_CONFIG

OK = 0  # asked to exit, or the conductor is gone: nothing is left to work for
FAILED = 1  # it could not start: the model does not load, memory is short
USAGE = 2  # the command line
BUG = 70  # sysexits.h EX_SOFTWARE: a thread broke, or a lifecycle was violated
DEVICE = 71  # EX_OSERR: the device is lost (a sticky CUDA error)
FENCED = 75  # EX_TEMPFAIL: the conductor counts this life as lost, or does not take it
CONFIG = EXIT_CONFIG  # 78: the configuration cannot be used; a restart does not help

HELP = f"""\
exit status: {OK} asked to exit, or the conductor is gone; {FAILED} it could not start; {USAGE} \
wrong usage; {BUG} internal error; {DEVICE} the device is lost; {FENCED} the conductor refuses it; \
{CONFIG} configuration error"""
