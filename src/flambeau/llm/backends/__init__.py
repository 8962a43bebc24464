"""Backends: each implements `executor.backend.Backend` for one kind of device. device_backends.py chooses one."""
