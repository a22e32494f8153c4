"""Plug-ins for verl 0.9.1, vLLM 0.23 and vllm-ascend 0.23, whose files stay as they were released.

Entry points of pyproject.toml load `verl_plugin` in each process that imports verl, and call
`vllm_plugin.register` in each process of a vLLM engine. What no plug-in, registry or subclass reaches is
changed by a hook after the import of a module (`hooks`). With other versions nothing happens.
"""
