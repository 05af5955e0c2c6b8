"""The optimizer that wraps another one."""
