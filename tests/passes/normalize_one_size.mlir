// RUN: secc opt %s -p normalize-loss 2>&1 | filecheck %s

// All drawn batches that take the path `long` have two samples of one width, so nothing tells its dims from constants. Another path
// shows that the block keeps samples apart.

// CHECK: secc: loss.py:2: the loss is not separable by sample: net has results of one size in all drawn batches that take this path
// CHECK-NEXT: what to do: let dataset() show more samples of other sizes on this path early, or give more --stats-samples

sec.graph "one size" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.case "short" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %m = sec.input "mask" : !sec.tensor<[B], f32>
    %any = sec.glue "aten.any.default" (%m) args "$0" : !sec.tensor<[], bool>
    sec.guard (%any) equals "False"
    %y = sec.call "net" (%x) args "$0" outs [""] at "loss.py:2" : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%y) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    sec.return (%l)
  }
  sec.case "long" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %m = sec.input "mask" : !sec.tensor<[B], f32>
    %any = sec.glue "aten.any.default" (%m) args "$0" : !sec.tensor<[], bool>
    sec.guard (%any) equals "True"
    %y = sec.call "net" (%x) args "$0" outs [""] at "loss.py:2" : !sec.tensor<[2, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%y) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    sec.return (%l)
  }
}
