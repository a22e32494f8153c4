def memcpy(*args):
    raise NotImplementedError("sleep mode needs the memory of a device")
