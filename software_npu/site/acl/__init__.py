"""CANN's Python interface, as far as it is asked: which chip this is."""


def get_soc_name() -> str:
    return "Ascend910_9391"
