"""Workloads that policies are run on; the reading of files is the client's, which hands the same to the service. Pure."""

from gpuscale.client.traces import MOST_REQUESTS, Request, ServiceModel, read_trace

__all__ = ["MOST_REQUESTS", "Request", "ServiceModel", "read_trace"]
