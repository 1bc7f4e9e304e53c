"""Figures of finished runs and the numbers behind them, from run folders: what `polyfed analyse` draws."""

from polyfed.analysis.network_figures import FIGURES, Analysis, Choices, analyse

__all__ = ["FIGURES", "Analysis", "Choices", "analyse"]
