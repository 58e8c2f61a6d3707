"""The contract's services and the users' operations; nothing below knows who calls. Begin with `endpoints`."""
