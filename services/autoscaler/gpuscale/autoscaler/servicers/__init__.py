"""The contract's services and what users do with them; nothing below knows who calls. Begin with `endpoints`."""
