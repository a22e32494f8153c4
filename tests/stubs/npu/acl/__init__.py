"""Stand-in for CANN's Python interface: which chip this is."""


def get_soc_name() -> str:
    return "Ascend910_9391"
