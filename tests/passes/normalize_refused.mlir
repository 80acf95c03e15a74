// RUN: secc opt %s -p normalize-loss 2>&1 | filecheck %s

// CHECK: secc: model.py:9: the loss is not separable by sample: aten.mm.default pairs every sample with every other
// CHECK-NEXT: what to do: let the loss be a sum or mean over samples of what each sample gives alone

sec.graph "contrastive" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %y = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %t = sec.glue "aten.t.default" (%y) args "$0" at "model.py:9" : !sec.tensor<[8, B], f32, grad>
    %scores = sec.glue "aten.mm.default" (%y, %t) args "$0, $1" at "model.py:9" : !sec.tensor<[B, B], f32, grad>
    %loss = sec.glue "aten.mean.default" (%scores) args "$0" at "model.py:10" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
  }
}
