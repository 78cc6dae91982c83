"""What a person sees: tables for the terminal, figures, and one self-contained HTML page.

The page's content is data first (`Page`, `Table`, `Chart`, `Fact`); the terminal and the page both print it.
"""

from microbatch.report._content import Chart, Fact, Page, Table
from microbatch.report._environment import environment
from microbatch.report._page import render
from microbatch.report._terminal import Screen

__all__ = ["Chart", "Fact", "Page", "Screen", "Table", "environment", "render"]
