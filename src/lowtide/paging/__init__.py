"""On-demand paging, for real: memory larger than memory, whose pages come by faults and go by age."""

from lowtide.paging.pager import Access, Pager, PagerStats, Prefetch

__all__ = ["Access", "Pager", "PagerStats", "Prefetch"]
