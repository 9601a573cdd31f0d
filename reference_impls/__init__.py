"""Trainers that keep the contract, to read and to start from: plain torch, and Hugging Face."""
