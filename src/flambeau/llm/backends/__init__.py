"""Backends: each implements `executor.backend.Backend` for one kind of device. loader.py chooses one."""
