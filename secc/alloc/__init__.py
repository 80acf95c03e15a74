"""Allocation: how many ranks each section gets, what shares devices, and how large micro-batches are; chosen
by CP-SAT."""
