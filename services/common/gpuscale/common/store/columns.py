"""Column types that mean the same in every database a store may be kept in."""

from sqlalchemy import BigInteger, Dialect, Integer, TypeDecorator
from sqlalchemy.types import TypeEngine


class Whole(TypeDecorator[int]):
    """A whole number of 64 bits. SQLite's INTEGER has as many; PostgreSQL's has 32, so it is a BIGINT there."""

    impl = Integer
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[int]:
        """The type in a database."""
        return dialect.type_descriptor(BigInteger() if dialect.name == "postgresql" else Integer())
