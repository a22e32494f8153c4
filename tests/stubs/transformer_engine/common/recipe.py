class DelayedScaling:
    """Only a base class here: nothing computes in fp8."""


class Format:
    pass
