"""Train a small CNN on handwritten digits, on one GPU or CPU. `train_cnn.py` does so on several."""

from __future__ import annotations

import time

import digits
import torch
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    args = digits.arguments(__doc__)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    training, validation = digits.load(args.data)
    loader = DataLoader(training, args.batch_size, shuffle=True)
    validation_loader = DataLoader(validation, 256)
    model = digits.Cnn(digits.classes(training)).to(device)
    lr = args.lr
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=args.epochs * len(loader))
    accuracy = 0.0

    for epoch in range(1, args.epochs + 1):
        model.train()
        begin, loss = time.perf_counter(), 0.0
        for images, labels in digits.progress(loader, f"epoch {epoch}"):
            images, labels = images.to(device), labels.to(device)
            batch_loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            batch_loss.backward()
            optimizer.step()
            schedule.step()
            loss += batch_loss.item() / len(loader)
        rate = len(training) / (time.perf_counter() - begin)

        model.eval()
        correct = 0.0
        with torch.no_grad():
            for images, labels in validation_loader:
                images, labels = images.to(device), labels.to(device)
                correct += (model(images).argmax(1) == labels).sum().item()
        accuracy = correct / len(validation)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.1%}, {rate:,.0f} samples/s")

    print(f"validation accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
