"""The contract's services: messages to values, one use case, values to messages. No decisions here, and no state. Begin with `servicer`."""
