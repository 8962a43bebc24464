from flambeau.torchserve.metrics.collector import main

if __name__ == "__main__":
    main()
