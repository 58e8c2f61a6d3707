"""ECC errors of a GPU, and the pages and rows of memory that were replaced because of them.

The driver also reports single errors as events: `source.EventSet`.
"""

import pynvml

from gpuscale.monitor.agent.nvml.field_values import FieldReading

ECC = (
    FieldReading("ecc_volatile_corrected_count", (pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,)),
    FieldReading("ecc_volatile_uncorrected_count", (pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,)),
    FieldReading("ecc_aggregate_corrected_count", (pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL,)),
    FieldReading("ecc_aggregate_uncorrected_count", (pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL,)),
    FieldReading("retired_pages_corrected_count", (pynvml.NVML_FI_DEV_RETIRED_SBE,)),
    FieldReading("retired_pages_uncorrected_count", (pynvml.NVML_FI_DEV_RETIRED_DBE,)),
    FieldReading("retired_pages_pending", (pynvml.NVML_FI_DEV_RETIRED_PENDING,), bool),
    FieldReading("remapped_rows_corrected_count", (pynvml.NVML_FI_DEV_REMAPPED_COR,)),
    FieldReading("remapped_rows_uncorrected_count", (pynvml.NVML_FI_DEV_REMAPPED_UNC,)),
    FieldReading("remapped_rows_pending", (pynvml.NVML_FI_DEV_REMAPPED_PENDING,), bool),
    FieldReading("remapped_rows_failed", (pynvml.NVML_FI_DEV_REMAPPED_FAILURE,), bool),
)
