// Browsers start no worker for a page that is opened as a file. There, a hidden frame runs the script of the search.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        frame.contentDocument.head.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
